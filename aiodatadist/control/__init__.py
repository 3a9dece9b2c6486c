"""The control plane: wire format, handshake, cache table, links, events and notifications."""
