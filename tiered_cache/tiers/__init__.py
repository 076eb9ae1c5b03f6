"""Places that hold frames: host memory, disk, object store; all of them a `base.Tier`."""
