"""What a bootstrap does for others: the gate and the relay server."""
