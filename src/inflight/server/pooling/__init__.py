"""Endpoints of models that pool: OpenAI's embeddings, Jina's and Cohere's reranking, and vLLM's others."""
