"""The method: adapters, losses, training, closed forms, theory and certificates."""
