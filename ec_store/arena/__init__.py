"""Memory of a host that engines share: one server owns it, engines write and read it directly."""
