"""A torch model as tokens and blocks: how it reads, runs and is identified. The user's model is never changed."""
