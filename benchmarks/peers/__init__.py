"""This engine beside llama.cpp, vLLM and OpenVINO GenAI: `python -m peers` in `benchmarks/`."""
