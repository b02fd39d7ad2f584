"""What every process stands on: settings, the bus, the stage loop, clocks and logs. Imports only schemas."""
