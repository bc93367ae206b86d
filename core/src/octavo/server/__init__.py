"""The HTTP server: OpenAI's protocol and Octavo's own routes in front of an AsyncLLM.

Owns everything between a socket and `AsyncLLM.generate`: keys, limits, validation, the shape of
answers, streams, metrics and shutdown. Must never import torch, and never touches a tensor, a
block or the scheduler: the engine is another process.
"""
