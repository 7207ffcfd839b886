"""Many machines, by Ray: the same service behind Ray Serve, and the job over many photos on Ray Data (extra [ray])."""
