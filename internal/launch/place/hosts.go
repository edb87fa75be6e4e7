package place

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Bounds of a host list. Slurm allows 64K hosts in a range.
const (
	maxHosts    = 64 << 10
	maxHostList = 1 << 20 // bytes of its text
	maxHostName = 255     // bytes, as in DNS
	maxDigits   = 18      // of a number in brackets, so that it fits 64 bits
)

// errTooMany is the error for a list of more hosts than any job has.
var errTooMany = fmt.Errorf("it contains more than %d hosts", maxHosts)

// Hosts expands a host list of Slurm, such as node[01-03,07],login1. It keeps order and duplicates, like `scontrol show
// hostnames`.
func Hosts(list string) ([]string, error) {
	if len(list) > maxHostList {
		return nil, fmt.Errorf("a host list of %d bytes; at most %d are read", len(list), maxHostList)
	}
	var hosts []string
	for rest := list; rest != ""; {
		term, after, err := nextTerm(rest)
		if err == nil {
			rest = after
			hosts, err = expand(hosts, term)
		}
		if err != nil {
			return nil, fmt.Errorf("host list %s: %w", terminal.Name(list), err)
		}
	}
	return hosts, nil
}

// nextTerm splits off the first term of a list. Separators inside brackets do not count.
func nextTerm(list string) (term, rest string, err error) {
	open := false
	for i := range len(list) {
		switch c := list[i]; {
		case c == '[' && open:
			return "", "", errors.New("brackets are nested")
		case c == ']' && !open:
			return "", "", errors.New("a closing bracket has no opening one")
		case c == '[' || c == ']':
			open = !open
		case open:
		case strings.IndexByte(", \t\n", c) >= 0:
			return list[:i], list[i+1:], nil
		case c <= ' ' || c >= 0x7f:
			return "", "", fmt.Errorf("%q is not allowed in a host name", c)
		}
	}
	if open {
		return "", "", errors.New("a bracket is not closed")
	}
	return list, "", nil
}

// A term is the text before, between and after the brackets, and the numbers in each bracket.
type term struct {
	text    []string // one more than brackets
	numbers [][]string
}

func expand(hosts []string, text string) ([]string, error) {
	if text == "" {
		return hosts, nil
	}
	t, count, err := parseTerm(text)
	if err != nil {
		return nil, err
	}
	if count > maxHosts-len(hosts) {
		return nil, errTooMany
	}
	at := make([]int, len(t.numbers)) // index into each bracket, as an odometer
	for range count {
		name := t.name(at)
		if len(name) > maxHostName {
			return nil, fmt.Errorf("a name of %d bytes; a host has at most %d", len(name), maxHostName)
		}
		hosts = append(hosts, name)
		t.advance(at)
	}
	return hosts, nil
}

// parseTerm parses a term, and counts its hosts.
func parseTerm(text string) (t term, count int, err error) {
	for count = 1; ; {
		before, rest, has := strings.Cut(text, "[")
		t.text = append(t.text, before)
		if !has {
			return t, count, nil
		}
		if len(t.text) > maxHostName {
			return term{}, 0, fmt.Errorf("more than %d brackets for one name", maxHostName)
		}
		inside, after, _ := strings.Cut(rest, "]")
		numbers, err := expandNumbers(inside)
		if err != nil {
			return term{}, 0, err
		}
		if count > maxHosts/len(numbers) {
			return term{}, 0, errTooMany
		}
		count *= len(numbers)
		t.numbers = append(t.numbers, numbers)
		text = after
	}
}

// expandNumbers expands the numbers in brackets. A range keeps the digits of its first number.
func expandNumbers(text string) ([]string, error) {
	var numbers []string
	for entry := range strings.SplitSeq(text, ",") {
		lo, hi, isRange := strings.Cut(entry, "-")
		if !isRange {
			hi = lo
		}
		first, err1 := digits(lo)
		last, err2 := digits(hi)
		if err1 != nil || err2 != nil || last < first {
			return nil, fmt.Errorf("[%s]: want numbers and ranges, such as [01-03,07]",
				terminal.Name(terminal.Clip(text, 40)))
		}
		if last-first >= uint64(maxHosts-len(numbers)) {
			return nil, errTooMany
		}
		for n := first; n <= last; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(lo), n))
		}
	}
	return numbers, nil
}

func digits(text string) (uint64, error) {
	if len(text) > maxDigits {
		return 0, strconv.ErrRange
	}
	return strconv.ParseUint(text, 10, 64)
}

// name returns the host with those indices into the brackets.
func (t *term) name(at []int) string {
	var b strings.Builder
	for i, n := range at {
		b.WriteString(t.text[i])
		b.WriteString(t.numbers[i][n])
	}
	b.WriteString(t.text[len(at)])
	return b.String()
}

// advance moves to the next host. In Slurm's order the last bracket changes fastest, then the first, the second and so
// on.
func (t *term) advance(at []int) {
	last := len(at) - 1
	for i := range at {
		j := i - 1
		if i == 0 {
			j = last
		}
		if at[j]++; at[j] < len(t.numbers[j]) {
			return
		}
		at[j] = 0
	}
}

const maxTasks = 1 << 20

// Counts expands Slurm's tasks per node, such as 2(x3),1.
func Counts(text string) ([]int, error) {
	fail := func() ([]int, error) {
		return nil, fmt.Errorf("tasks on the nodes %s: want counts such as 2(x3),1, of at most %d nodes and %d tasks",
			terminal.Name(text), maxHosts, maxTasks)
	}
	if len(text) > maxHostList {
		return fail()
	}
	var counts []int
	sum := 0
	for entry := range strings.SplitSeq(text, ",") {
		number, times, repeated := strings.Cut(entry, "(x")
		repeat := uint64(1)
		if repeated {
			inner, closed := strings.CutSuffix(times, ")")
			n, err := digits(inner)
			if !closed || err != nil || n < 1 {
				return fail()
			}
			repeat = n
		}
		n, err := digits(number)
		if err != nil || repeat > uint64(maxHosts-len(counts)) || n > uint64(maxTasks-sum)/repeat {
			return fail()
		}
		for range repeat {
			counts = append(counts, int(n))
		}
		sum += int(n * repeat)
	}
	return counts, nil
}
