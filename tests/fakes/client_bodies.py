"""Request bodies with the fields that well-known clients send, shortened; the values are made up.

Each is a second turn or later if the client sends back earlier answers, with the fields that it adds.
"""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "File"}, "limit": {"type": "integer", "default": 10}},
    "required": ["path"],
    "additionalProperties": False,
}
_CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

CLAUDE_CODE: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00000;"},
        {"type": "text", "text": "You are Claude Code.", **_CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}, "caller": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "one"}],
                    "is_error": False,
                    **_CACHED,
                }
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "eager_input_streaming": True},
        {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA, "strict": False, **_CACHED},
    ],
    "tool_choice": None,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "max"},
    "betas": ["claude-code-20250219", "context-management-2025-06-27"],
    "service_tier": "auto",
    "speed": "fast",
    "temperature": 1,
    "stream": True,
}

CODEX: dict[str, Any] = {
    "model": "echo",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "id": None, "role": "developer", "content": [{"type": "input_text", "text": "<sandbox/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}], "phase": None},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look."}],
            "end_turn": False,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "shell",
            "arguments": '{"path":"a"}',
            "status": "completed",
            "namespace": None,
        },
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "xhigh", "summary": "auto", "context": None},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0198",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "i"},
}

LITELLM: dict[str, Any] = {
    "model": "echo",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be kind", **_CACHED}], **_CACHED},
        {"role": "user", "content": "ask"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "images": [],
            "function_call": None,
            "reasoning_content": "hm",
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}],
            "provider_specific_fields": {"refusal": None, "reasoning": "hm", "stop_reason": None},
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a"}', "provider_specific_fields": {"a": 1}},
                    "provider_specific_fields": {"thought_signature": "x"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "read", "content": "one", "status": "success"},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA, **_CACHED}, **_CACHED}],
    "tool_choice": "auto",
    "reasoning_effort": "high",
    "verbosity": "high",
    "store": True,
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "x"},
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "stream": True,
    "user": "u",
    "metadata": {"tags": "t"},
}

OPEN_WEBUI: dict[str, Any] = {  # 0.12.4, with its tools; every advanced parameter is set, and is what it is at first
    "stream": True,
    "model": "echo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_current_timestamp", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "1795923872"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ],
    "stream_options": {"include_usage": True},
    "seed": 0,
    "temperature": 0.8,
    "reasoning_effort": "medium",
    "logit_bias": {"5": 1, "41": -100},
    "max_tokens": 128,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0,
    "frequency_penalty": 1.1,
    "presence_penalty": 0,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "repeat_last_n": -1,  # at first 64, which is rejected beside repeat_penalty
    "tfs_z": 1,
    "repeat_penalty": 1.1,
    "num_keep": 24,
    "num_ctx": 2048,
    "num_batch": 512,
    "num_thread": 2,
    "num_gpu": 0,
    "use_mmap": True,
    "use_mlock": True,
    "keep_alive": "5m",
    "think": True,
    "format": "json",
    "stop": ["\\n\\n"],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_current_timestamp",
                "description": "Get the current Unix timestamp in seconds.",
                "parameters": {"properties": {}, "type": "object"},
            },
        }
    ],
}

OPENAI_AGENTS: dict[str, Any] = {
    "model": "echo",
    "messages": [
        {"role": "user", "content": "ask"},
        {
            "role": "assistant",
            "content": '{"path": "a"}',
            "parsed": {"path": "a"},
            "extra_content": {"google": {"thought": True}},
            "function_call": {"name": "f", "arguments": "{}"},
        },
        {"role": "user", "content": "go on"},
    ],
    "stream": False,
    "prompt_cache_retention": "24h",
    "reasoning_effort": None,
    "modalities": None,
    "audio": None,
    "functions": None,
    "web_search_options": None,
    "extra_headers": None,
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": ("messages", CLAUDE_CODE),
    "Codex": ("responses", CODEX),
    "litellm": ("chat/completions", LITELLM),
    "Open WebUI": ("chat/completions", OPEN_WEBUI),
    "OpenAI Agents": ("chat/completions", OPENAI_AGENTS),
}
"""The route, below /v1, and the body that a client sends there."""
