package launch

import "golang.org/x/sys/unix"

// totalMemory returns the memory of this host in bytes; 0: not known.
func totalMemory() int64 {
	n, _ := unix.SysctlUint64("hw.memsize") // 0 with an error
	return int64(n)
}
