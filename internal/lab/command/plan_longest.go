package command

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// quick plans without what only a reader of one plan looks at. It chooses as a run does.
func (o *PlanOptions) quick(
	path string, m machine.Machine, ranks int, costs plan.Costs, set ...string,
) (*plan.Plan, error) {
	d, err := o.decider(m)
	if err != nil {
		return nil, err
	}
	cfg, err := loadPlanned(path, config.Options{
		Set: append(slices.Clone(o.Set), set...), Ranks: ranks, Hosts: m.Hosts, Device: m.Device(), NoFiles: true,
		Decide: d.Decide,
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
		return inputf("--longest: nothing says how much memory a device has; name a card, such as --assume gpu=h200, " +
			"or add memory=80G")
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
		fmt.Fprintf(o.Stdout, "longest     %d tokens a sequence fit; of %d: %s\n\n", lo*stretchUnit, (lo+1)*stretchUnit,
			terminal.Text(why.Error()))
	}
	return nil
}
