"""Transforming files, compressed and stored embeddings, indexes, stores, monitor and report."""
