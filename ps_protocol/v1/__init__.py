"""Generated from proto/ps_protocol/v1 by `make proto`; do not edit the modules beside this one."""
