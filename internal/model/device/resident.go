package device

import (
	"runtime"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// residentBytes returns the most that this process has had resident, as the kernel counts it;
// where it does not, what Go has taken from the system.
func residentBytes() float64 {
	status, err := files.Read("/proc/self/status", 1<<20)
	if err == nil {
		if n, ok := peakResident(string(status)); ok {
			return n
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys)
}

// peakResident reads VmHWM of /proc/PID/status: "VmHWM:	   12345 kB".
func peakResident(status string) (float64, bool) {
	for line := range strings.Lines(status) {
		rest, ok := strings.CutPrefix(line, "VmHWM:")
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 64)
		return n * 1024, err == nil
	}
	return 0, false
}
