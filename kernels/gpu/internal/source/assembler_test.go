package source

import (
	"regexp"
	"strconv"
	"strings"
)

// usage is a kernel's share of an SM, from the assembler's --ptxas-options=-v.
type usage struct {
	Kernel    string
	Registers int // of a thread
	Stack     int // bytes of local memory of a thread
	Spilled   int // bytes stored and loaded for want of registers, summed over the code
	Shared    int // bytes of static shared memory of a block
}

var (
	usageOf    = regexp.MustCompile(`(?:Compiling entry function|Function properties for) '?([\w$]+)'?`)
	usageStack = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usageRegs  = regexp.MustCompile(`Used (\d+) registers`)
	usageSmem  = regexp.MustCompile(`(\d+) bytes smem`)
)

// parseUsage reads the kernels of a log, in its order.
func parseUsage(log string) []usage {
	var all []usage
	entry := false // the line is about a kernel, not about a function that it calls
	for line := range strings.Lines(log) {
		if m := usageOf.FindStringSubmatch(line); m != nil {
			if strings.Contains(line, "Compiling entry function") {
				all = append(all, usage{Kernel: m[1]})
			}
			entry = len(all) > 0 && all[len(all)-1].Kernel == m[1]
		}
		if len(all) == 0 {
			continue
		}
		u := &all[len(all)-1]
		if m := usageStack.FindStringSubmatch(line); m != nil {
			// Spills of a function that is not inlined count for its caller.
			u.Stack += number(m[1])
			u.Spilled += number(m[2]) + number(m[3])
		}
		if m := usageRegs.FindStringSubmatch(line); m != nil && entry {
			u.Registers = number(m[1])
			if m := usageSmem.FindStringSubmatch(line); m != nil {
				u.Shared = number(m[1])
			}
		}
	}
	return all
}

func number(s string) int {
	n, _ := strconv.Atoi(s) // the pattern has digits only
	return n
}

// slow matches the assembler's remarks about serialised wgmma instructions and ignored register counts: C7508, C7510
// and similar ones.
var slow = regexp.MustCompile(`\(C75\d\d\)|Potential Performance Loss|setmaxnreg ignored|'setmaxnreg' ignored`)

// warnings returns the warnings in a log, and the assembler's remarks about slow code.
func warnings(log string) []string {
	var all []string
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, "warning") || slow.MatchString(line) {
			all = append(all, line)
		}
	}
	return all
}
