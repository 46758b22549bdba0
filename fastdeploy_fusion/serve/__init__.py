"""An OpenAI-compatible server over ranks that run in lock step: scheduler, engine, HTTP. See docs/serving.md.

Only ``step`` touches Paddle and numpy. FastAPI, uvicorn and jinja2, the extra ``serve``, are needed by the HTTP side.
"""
