package machine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
)

type assumption struct {
	name, want string
	gpu        bool // describes a GPU: refused with arch=cpu
	set        func(m *Machine, value string) error
}

// assumptions lists the keys in the order of the help text. Their ranges cover real machines, to catch typing errors.
var assumptions = []assumption{
	{"gpu", "the name of a card such as h200, h100, a100 or b200", true, setCard},
	{"arch", "sm90, 90 or cpu", false, setArch},
	{"cudnn", "a version of cuDNN such as 9.1.0, or none", true, setCUDNN},
	{"flash", "built or none", true, setFlash},
	{"gpus", "a number of GPUs of one host, 1 to 65536", true, count(func(m *Machine) *int { return &m.GPUs })},
	{"hosts", "a number of hosts, 1 to 65536", false, count(func(m *Machine) *int { return &m.Hosts })},
	{"memory", "bytes of one device, or of a machine without, such as 80G, 16M to 65536G", false,
		amount(16<<20, func(m *Machine) *int64 { return &m.Memory })},
	{"link", "bytes a second that one device sends such as 450G, 1M to 65536G", false,
		amount(1<<20, func(m *Machine) *int64 { return &m.Link })},
	{"net", "bytes a second that one device sends to other hosts such as 50G, 1M to 65536G", false,
		amount(1<<20, func(m *Machine) *int64 { return &m.Net })},
	{"ram", "bytes of memory of one host, for memory.offload, such as 2T, 16M to 65536G", false,
		amount(16<<20, func(m *Machine) *int64 { return &m.RAM })},
}

func amount(least int64, field func(*Machine) *int64) func(*Machine, string) error {
	return func(m *Machine, v string) (err error) {
		*field(m), err = size(v, least, 1<<46)
		return err
	}
}

func count(field func(*Machine) *int) func(*Machine, string) error {
	return func(m *Machine, v string) error {
		n, err := size(v, 1, 1<<16)
		*field(m) = int(n)
		return err
	}
}

// AssumeHelp is the help text of --assume.
const AssumeHelp = "plan for another machine, `k=v,...` of gpu=h200 (or h200, or arch=sm90), cudnn=9.1.0, " +
	"flash=built, gpus=8, hosts=16, memory=80G, link=450G, net=50G, ram=2T (repeatable)"

// AssumeError is a fault of the --assume flag Arg; Msg describes it.
type AssumeError struct{ Arg, Msg string }

func (e *AssumeError) Error() string { return fmt.Sprintf("--assume %.200q: %s", e.Arg, e.Msg) }

// Assume returns the machine for a list of --assume flags, each "key=value,..."; the name of a card is enough. By
// default a GPU has no cuDNN, and has flash kernels, which are compiled on the machine itself. The error joins an
// AssumeError for each fault.
func Assume(args []string) (Machine, error) {
	m := Machine{Assumed: len(args) > 0}
	given, faults := map[string]string{}, []error(nil)
	var order []string
	for _, arg := range args {
		for _, pair := range strings.Split(arg, ",") {
			if pair != "" && lookup(pair) == nil && !strings.Contains(pair, "=") {
				pair = "gpu=" + pair
			}
			if err := m.assume(pair, given); err != nil {
				faults = append(faults, err)
				continue
			}
			order = append(order, pair)
		}
	}
	faults = append(faults, m.describe(given)...)
	missing := map[string]string{"": "none is named; add gpu=h200, arch=sm90 or whichever it is",
		"cpu": "arch=cpu has none; leave one of the two out"}
	if why, ok := missing[given["arch"]]; ok && m.IsCPU() {
		for _, pair := range order {
			name, value, _ := strings.Cut(pair, "=")
			count := name == "gpus" && given["arch"] == "" // of ranks, on any device
			if lookup(name).gpu && value != "none" && !count {
				faults = append(faults, &AssumeError{pair, "it describes a GPU, and " + why})
			}
		}
	}
	if m.IsCPU() && m.RAM > 0 { // a machine without GPUs has one memory
		if given["memory"] != "" {
			faults = append(faults, &AssumeError{"ram=" + given["ram"], "a machine without GPUs has one memory, and " +
				"memory=" + given["memory"] + " says how much; leave one of the two out"})
		}
		m.Memory, m.RAM = m.RAM, 0
	}
	if !m.IsCPU() && given["flash"] == "" {
		m.Flash = BuiltFlash
	}
	return m, errors.Join(faults...)
}

// describe fills in the figures of a named card that no key sets.
func (m *Machine) describe(given map[string]string) []error {
	card, ok := CardOf(m.Name)
	if !ok {
		return nil
	}
	if !m.IsCPU() && m.Arch != card.Arch || given["arch"] == "cpu" {
		return []error{&AssumeError{"gpu=" + given["gpu"],
			fmt.Sprintf("it has arch=sm%d, not %s; leave one of the two out", card.Arch, given["arch"])}}
	}
	m.Arch, m.Memory, m.Link = card.Arch, cmp.Or(m.Memory, card.Memory), cmp.Or(m.Link, int64(card.Link))
	return nil
}

func setCard(m *Machine, v string) error {
	card, ok := CardOf(v)
	if !ok {
		var keys []string
		for _, c := range cards {
			keys = append(keys, c.Key)
		}
		if meant := config.Nearest(v, keys); meant != "" {
			return fmt.Errorf("no such card here; did you mean %s?", meant)
		}
		return errors.New("no such card here; the cards are " + strings.Join(keys, ", ") +
			", and arch=, memory= and link= describe others")
	}
	m.Name = card.Name
	return nil
}

func (m *Machine) assume(pair string, given map[string]string) error {
	name, value, ok := strings.Cut(pair, "=")
	a := lookup(name)
	switch {
	case pair == "":
		return &AssumeError{pair, "empty; write key=value,key=value"}
	case a == nil:
		names := make([]string, len(assumptions))
		for i, b := range assumptions {
			names[i] = b.name
		}
		if meant := config.Nearest(name, names); meant != "" {
			return &AssumeError{pair, "unknown key; did you mean " + meant + "?"}
		}
		return &AssumeError{pair, "unknown key; the keys are " + strings.Join(names, ", ")}
	case !ok || value == "":
		return &AssumeError{pair, fmt.Sprintf("no value; write %s=%s", name, a.want)}
	case given[name] == value:
		return &AssumeError{pair, "given twice"}
	case given[name] != "":
		return &AssumeError{pair, fmt.Sprintf("given before as %s=%.100s; leave one out", name, given[name])}
	}
	given[name] = value
	if err := a.set(m, value); err != nil {
		return &AssumeError{pair, err.Error() + "; want " + a.want}
	}
	return nil
}

func lookup(name string) *assumption {
	if i := slices.IndexFunc(assumptions, func(a assumption) bool { return a.name == name }); i >= 0 {
		return &assumptions[i]
	}
	return nil
}

// setArch takes sm90, sm_90, sm90a (the same GPU) or 90.
func setArch(m *Machine, v string) error {
	if v == "cpu" {
		return nil
	}
	digits := strings.TrimPrefix(strings.TrimPrefix(v, "sm"), "_")
	if digits != v {
		digits = strings.TrimRight(digits, "af")
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	switch {
	case err != nil || digits[0] == '0':
		return errors.New("not an architecture")
	case n < 30 || n > 199:
		return fmt.Errorf("sm%d is no GPU; the number is 10 times the compute capability", n)
	}
	m.Arch = int(n)
	return nil
}

func setCUDNN(m *Machine, v string) (err error) {
	m.CUDNN, err = backends.ParseVersion(v)
	if err == nil && v != "none" && !backends.PossibleCUDNN(m.CUDNN) {
		err = fmt.Errorf("no such cuDNN: %s", m.CUDNN)
	}
	return err
}

func setFlash(m *Machine, v string) error {
	switch v {
	case "built":
		m.Flash = BuiltFlash
	case "none":
		m.Flash = 0
	default:
		return errors.New("not a choice")
	}
	return nil
}

func size(v string, least, most int64) (int64, error) {
	n, err := config.ParseSize(v)
	if err == nil && (n < least || n > most) {
		err = fmt.Errorf("%d is out of range", n)
	}
	return n, err
}
