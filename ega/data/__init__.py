"""Reading, checking and storing embeddings, labels and pairs, and embedding with an encoder."""
