"""Keys and values of past tokens: where they are kept and how they are cut."""
