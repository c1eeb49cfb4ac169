"""One file an engine, each run by the interpreter that has the engine."""
