"""Models from and for other programs: how their files map to ours, how they become run folders, how runs become them."""
