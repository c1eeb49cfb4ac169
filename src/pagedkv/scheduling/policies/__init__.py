"""Who is served first, who yields, who gets how much: small pure functions, one idea a file."""
