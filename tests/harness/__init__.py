"""What the suites over real processes share: servers, runs with a watchdog, the kernel's own numbers, a table
of results."""
