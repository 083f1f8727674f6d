"""Batch jobs over HTTP: OpenAI's Files and Batches APIs, and how the requests of a job are answered."""
