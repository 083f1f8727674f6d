"""Endpoints of models that pool: embeddings as OpenAI has them, reranking as Jina and Cohere, and vLLM's others."""
