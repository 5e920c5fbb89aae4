"""How buffers move between ranks: transports, and what they share."""
