package launch

import "golang.org/x/sys/unix"

// totalMemory returns the memory of this host in bytes; 0: not known.
func totalMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
