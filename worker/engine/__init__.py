"""The engine child's half of the worker: owns the device and the model, knows no queue and no HTTP."""
