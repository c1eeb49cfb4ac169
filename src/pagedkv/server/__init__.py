"""The engine as a service: OpenAI API, conduct under load, metrics, a live picture."""
