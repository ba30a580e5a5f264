"""The OpenAI API: completions, chat, embeddings, models; with what vLLM adds to it."""
