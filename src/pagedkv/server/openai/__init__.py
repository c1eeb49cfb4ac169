"""The OpenAI API: its words and what they become."""
