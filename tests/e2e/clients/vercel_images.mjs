// Vercel's AI SDK with images, as its guide to prompts shows it, over three APIs. See test_media_clients.py for the
// variables of the environment. It runs in the folder of the packages.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const { QUIRE_URL: baseURL, QUIRE_KEY: apiKey, QUIRE_SITE: site, QUIRE_PICTURES: folder } = process.env;
const [aboutOne, aboutTwo] = JSON.parse(process.env.QUIRE_ANSWERS);
const text = { type: 'text', text: 'What is in this image?' };
const first = readFileSync(`${folder}/first.png`);
const second = { type: 'file', mediaType: 'image/jpeg', data: readFileSync(`${folder}/second.jpg`) };
const pdf = { type: 'file', mediaType: 'application/pdf', data: readFileSync(`${folder}/pages.pdf`) };
const options = { temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText } = await load('ai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createAnthropic } = await load('@ai-sdk/anthropic');

const openai = createOpenAI({ baseURL, apiKey });
const supportedUrls = () => ({ 'image/*': [/^https?:/] }); // or the SDK fetches them
const models = {
  'openai-compatible': createOpenAICompatible({ name: 'quire', baseURL, apiKey, supportedUrls })('tiny'),
  'openai chat': openai.chat('tiny'),
  'openai responses': openai('tiny'),
  anthropic: createAnthropic({ baseURL, apiKey })('tiny'),
};
const parts = [
  { type: 'file', mediaType: 'image', data: first },
  { type: 'file', mediaType: 'image/png', data: first.toString('base64') },
  { type: 'file', mediaType: 'image/png', data: { type: 'data', data: first } },
  { type: 'file', mediaType: 'image', data: new URL(`${site}/first.png`) },
  { type: 'image', image: first },
  { type: 'image', image: `data:image/png;base64,${first.toString('base64')}` },
];

for (const [name, model] of Object.entries(models)) {
  for (const part of parts) {
    const messages = [{ role: 'user', content: [text, part] }];
    assert.equal((await generateText({ model, messages, ...options })).text, aboutOne, `${name}: ${part.type}`);
  }
  const asked = [{ role: 'user', content: [text, pdf] }];
  const { usage } = await generateText({ model, messages: asked, ...options });
  assert.ok(usage.inputTokens > 2 * 63, `${name}: ${usage.inputTokens} tokens`);
  const messages = [{ role: 'user', content: [text, parts[0], second] }];
  let streamed = '';
  for await (const piece of streamText({ model, messages, ...options }).textStream) streamed += piece;
  assert.equal(streamed, aboutTwo, name);
}
console.log('ai', require('ai/package.json').version);
