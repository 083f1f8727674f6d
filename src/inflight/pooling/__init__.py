"""Embeddings, labels and scores: what a checkpoint says about them (`checkpoint`), what callers ask for and get back
(`requests`), and how texts and pairs become tokens (`texts`). No torch.
"""
