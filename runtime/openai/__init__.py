"""The OpenAI-compatible HTTP endpoint over an `LLM` (FastAPI and uvicorn).

Bodies come in through `bodies`, answers go out through `replies` and `events`; `app` holds the
routes, `front` what is around all of them and `server` the life of the process.
"""
