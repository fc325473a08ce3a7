"""Where images come from, and what happens to them before the network sees them."""
