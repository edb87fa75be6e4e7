package command

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/bench"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/terminal"
)

// quick plans without what only a reader of one plan looks at. It chooses as a run does.
func (o *PlanOptions) quick(path string, m machine.Machine, ranks int, costs plan.Costs, set ...string) (*plan.Plan, error) {
	d, err := o.decider(m)
	if err != nil {
		return nil, err
	}
	cfg, err := loadPlanned(path, config.Options{
		Set: append(slices.Clone(o.Set), set...), Ranks: ranks, Hosts: m.Hosts, Device: m.Device(), NoFiles: true, Decide: d.Decide,
	})
	if err != nil {
		return nil, err
	}
	choice, err := choose(cfg, m, d.Chosen)
	if err != nil {
		return nil, err
	}
	opts := planOptions(m, choice.Choice, costs)
	opts.Quick, opts.Chosen = true, d.Chosen
	return plan.Make(cfg, ranks, opts)
}

// stretchUnit is what the longest sequence is a multiple of.
const stretchUnit = 1 << 10

// stretch sets data.seq_len to the longest sequence that fits the memory, by bisection.
func (o *PlanOptions) stretch(path string, m machine.Machine, ranks int) error {
	if m.Memory == 0 {
		return inputf("--longest: nothing says how much memory a device has; name a card, such as --assume gpu=h200, or add memory=80G")
	}
	for _, s := range o.Set {
		if strings.HasPrefix(s, "data.seq_len=") {
			return inputf("--longest finds data.seq_len itself; leave --set %s out", terminal.Name(s))
		}
	}
	set := func(units int) string { return fmt.Sprintf("data.seq_len=%d", units*stretchUnit) }
	var why error
	fits := func(units int) bool {
		p, err := o.quick(path, m, ranks, plan.Costs{}, set(units))
		if err == nil && !p.Memory.Fits {
			err = p.Memory.Check()
		}
		if err != nil {
			why = err
		}
		return err == nil
	}
	least := max(1, (2*ranks+stretchUnit-1)/stretchUnit)
	if !fits(least) {
		return &InputError{fmt.Errorf("--longest: not even %d tokens: %w", least*stretchUnit, why)}
	}
	const most = 1 << 30 // units: more than any memory holds
	lo, hi := least, 2*least
	for hi < most && fits(hi) {
		lo, hi = hi, 2*hi
	}
	for lo+1 < hi {
		if mid := (lo + hi) / 2; fits(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	o.Set = append(o.Set, set(lo))
	if !o.JSON {
		fmt.Fprintf(o.Stdout, "longest     %d tokens a sequence fit; of %d: %s\n\n", lo*stretchUnit, (lo+1)*stretchUnit, terminal.Text(why.Error()))
	}
	return nil
}

// axis is one --grid.
type axis struct {
	key    string
	values []string
}

// Cell is one combination of a grid, as --json prints it.
type Cell struct {
	Values   map[string]string `json:"values"`
	Ranks    int               `json:"ranks,omitempty"`
	Backend  string            `json:"backend,omitempty"`
	Memory   *plan.Memory      `json:"memory,omitempty"`
	Estimate *plan.Estimate    `json:"estimate,omitempty"`
	Error    string            `json:"error,omitempty"` // why there is no plan of it
}

// maxCells is more than anybody reads.
const maxCells = 4096

// grid prints a table of plans, and returns the exit status.
func (o *PlanOptions) grid(path string) (int, error) {
	if o.Longest {
		return 0, inputf("--grid and --longest: a table or one plan; leave one of the two out")
	}
	axes, err := o.axes()
	if err != nil {
		return 0, err
	}
	costs, known := costsOf{}, 0
	var cells []Cell
	for _, values := range combinations(axes) {
		cell := Cell{Values: values}
		if err := o.cell(path, axes, &cell, costs); err != nil {
			cell.Error = err.Error()
		} else {
			known++
		}
		cells = append(cells, cell)
	}
	if known == 0 {
		return 0, inputf("--grid: no cell can be planned: %s", cells[0].Error)
	}
	if o.JSON {
		enc := json.NewEncoder(terminal.JSON(o.Stdout))
		enc.SetIndent("", "  ")
		return 0, enc.Encode(cells)
	}
	table := gridTable(axes, cells)
	_, err = table.WriteTo(o.Stdout)
	return 0, err
}

// axes reads the flags.
func (o *PlanOptions) axes() ([]axis, error) {
	var axes []axis
	cells := 1
	for _, text := range o.Grid {
		key, list, ok := strings.Cut(text, "=")
		if !ok || key == "" || list == "" {
			return nil, inputf("--grid %s: want key=value,value, such as data.seq_len=32K,64K or nproc=1,2", terminal.Name(text))
		}
		if slices.ContainsFunc(axes, func(a axis) bool { return a.key == key }) {
			return nil, inputf("--grid %s: given twice; put all values in one", terminal.Name(key))
		}
		a := axis{key, strings.Split(list, ",")}
		if slices.Contains(a.values, "") {
			return nil, inputf("--grid %s: an empty value", terminal.Name(text))
		}
		axes = append(axes, a)
		if cells *= len(a.values); cells > maxCells {
			return nil, inputf("--grid: more than %d cells; leave values out", maxCells)
		}
	}
	return axes, nil
}

// combinations are all of them, the last key changing fastest.
func combinations(axes []axis) []map[string]string {
	all := []map[string]string{{}}
	for _, a := range axes {
		var next []map[string]string
		for _, c := range all {
			for _, v := range a.values {
				with := map[string]string{a.key: v}
				for k, x := range c {
					with[k] = x
				}
				next = append(next, with)
			}
		}
		all = next
	}
	return all
}

// cell plans one combination. What is no key of the config is nproc, or one of --assume.
func (o *PlanOptions) cell(path string, axes []axis, cell *Cell, costs costsOf) error {
	with := *o
	with.Set, with.Assume = slices.Clone(o.Set), slices.Clone(o.Assume)
	for _, a := range axes {
		switch v := cell.Values[a.key]; {
		case a.key == "nproc":
			with.NProc = v
		case strings.Contains(a.key, "."):
			with.Set = append(with.Set, a.key+"="+v)
		default:
			with.Assume = append(with.Assume, a.key+"="+v)
		}
	}
	m, ranks, err := with.where()
	if err != nil {
		return err
	}
	p, err := with.quick(path, m, ranks, costs.of(&o.Options, m))
	if err != nil {
		return err
	}
	cell.Ranks, cell.Backend, cell.Memory, cell.Estimate = ranks, p.Attention.Backend, &p.Memory, &p.Estimate
	return nil
}

// gridTable is the cells for a terminal.
func gridTable(axes []axis, cells []Cell) bench.Table {
	t := bench.Table{}
	for _, a := range axes {
		t.Head = append(t.Head, a.key)
	}
	t.Head = append(t.Head, "ranks", "backend", "step", "tokens/s", "per device", "rate", "MFU", "memory", "")
	for _, c := range cells {
		var row []string
		for _, a := range axes {
			row = append(row, terminal.Name(c.Values[a.key]))
		}
		if c.Error != "" {
			first, _, _ := strings.Cut(c.Error, "\n")
			t.Notes = append(t.Notes, fmt.Sprintf("%s: %s", strings.Join(row, ", "), terminal.Text(first)))
			t.Add(append(row, "", "", "", "", "", "", "", "", "no plan")...)
			continue
		}
		e, mfu, fits := c.Estimate, "", ""
		if e.MFU > 0 {
			mfu = fmt.Sprintf("%.1f%%", 100*e.MFU)
		}
		if !c.Memory.Fits {
			fits = "does not fit"
		}
		t.Add(append(row, fmt.Sprint(c.Ranks), c.Backend, plan.Seconds(e.SecondsPerStep), fmt.Sprintf("%.0f", e.TokensPerSecond),
			fmt.Sprintf("%.0f", e.TokensPerSecond/float64(c.Ranks)), plan.FLOPs(e.TFLOPsPerDevice), mfu, plan.Bytes(c.Memory.Total), fits)...)
	}
	return t
}
