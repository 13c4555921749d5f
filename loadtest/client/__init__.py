"""How requests reach a server: OpenAI-compatible HTTP with SSE, and Baton's gRPC stream."""
