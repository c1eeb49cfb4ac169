"""An engine on several workers: actors of Ray that compute, one that routes, and a link to them."""
