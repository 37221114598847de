"""Which paths lead to backends. All of them take POST and name a model; what else they are about is the engines'.

A list, and not whatever comes: engines have paths of their own that change weights, caches and adapters, and those are
not for clients.
"""

MESSAGES = "/v1/messages"
# Those whose answers the gateway knows: tokens, choices, streams that can be gone on with.
KNOWN = frozenset(
    (*(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")), MESSAGES)
)
# Those of which it reads the model and passes the rest: a sound, a picture, scores. An engine that has no such path is
# not at fault for it.
PASSED = frozenset(
    (
        "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/moderations", "/v1/audio/speech",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations", "/v1/images/edits",
        "/v1/images/variations", "/tokenize", "/detokenize", "/pooling", "/classify",
    )
)  # fmt: skip
SERVED = KNOWN | PASSED
# Those that make pictures.
PICTURES = frozenset(f"/v1/images/{name}" for name in ("generations", "edits", "variations"))
# Those whose answers are no text: nothing of them is counted as tokens.
WORDLESS = (PASSED | {"/v1/embeddings"}) - {"/v1/audio/transcriptions", "/v1/audio/translations"}
# Those that come as forms with files in them, and are never read as JSON.
FORMS = frozenset(
    (
        "/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations",
    )
)  # fmt: skip
