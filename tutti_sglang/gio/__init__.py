"""GPU-submitted I/O: IOCB rings, queue pairs, controllers behind them, and what moves the bytes."""
