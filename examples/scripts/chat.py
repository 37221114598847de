"""A chat through the gateway with OpenAI's own client, streamed, and where the gateway sent it.

crosstie serve examples/fleets/two_vendors.toml --emulate --speed 20 &
python examples/scripts/chat.py http://127.0.0.1:8080/v1
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="not-needed-without-keys")
answer = client.chat.completions.with_raw_response.create(
    model="llama-3.1-8b",
    messages=[{"role": "user", "content": "Why do two rails need ties?"}],
    max_tokens=40,
    extra_headers={"x-crosstie-class": "chat"},
)
print("pool:", answer.headers["x-crosstie-pool"])
print("reason:", answer.headers["x-crosstie-reason"])

stream = client.chat.completions.create(
    model="llama-3.1-8b",
    messages=[{"role": "user", "content": "And why a gauge?"}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.usage:
        print("tokens:", chunk.usage.prompt_tokens, "in,", chunk.usage.completion_tokens, "out")
