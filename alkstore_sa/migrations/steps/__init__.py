"""The numbered steps; each is frozen by the release that ships it."""
