"""Host and disk below the device: blocks under names that mean the same in every process."""
