"""An MCP server over standard input and output with one tool."""

import json
import sys

TOOL = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "annotations": {"readOnlyHint": True},
}

for line in sys.stdin:
    request = json.loads(line)
    match request:
        case {"method": "initialize", "params": {"protocolVersion": version}}:
            info = {"name": "weather", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case {"method": "tools/list"}:
            result = {"tools": [TOOL]}
        case {"method": "tools/call", "params": {"name": "get_weather", "arguments": {"city": city}}}:
            result = {"content": [{"type": "text", "text": f"sunny in {city}"}]}
        case _:
            result = {}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
