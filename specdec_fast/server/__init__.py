"""OpenAI's API over HTTP: the bodies (``protocol``, ``answers``), the application (``app``) and its metrics."""
