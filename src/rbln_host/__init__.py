"""The open toolchain: compiles and runs static-shape programs on any CPU."""
