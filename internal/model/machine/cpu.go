package machine

import (
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// CPUName returns the model of this machine's processor, or "CPU".
func CPUName() string {
	text, err := files.Read("/proc/cpuinfo", 16<<20)
	if err != nil {
		return "CPU"
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return "CPU"
}
