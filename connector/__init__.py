"""What runs inside an engine's processes: the protocol's clients, and the connector for vLLM."""
