package command

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// stretchUnit is the number of tokens that lengths of --longest are multiples of.
const stretchUnit = 1 << 10

// mostUnits is more than any memory holds.
const mostUnits = 1 << 30

type decide = func(cfg *config.Config, ranks, hosts int) error

// A stretch is the search for the longest sequence that fits. Its lengths are in units.
type stretch struct {
	o     *PlanOptions
	path  string
	d     *plan.Decider
	ranks int

	why    error      // of the last length that does not fit
	longer *plan.Plan // of that length; nil: it breaks a rule
	lacks  [2]lack    // of the last two; the lack of memory is nearly linear in the length
}

// A lack is the memory that a length lacks.
type lack struct {
	units int
	bytes float64
}

// setLongest sets data.seq_len to the longest sequence that fits the memory.
func (o *PlanOptions) setLongest(path string, m machine.Machine, ranks int) error {
	if m.Memory == 0 {
		return inputf("--longest: the memory of a device is not known; name a card, such as --assume gpu=h200, or add " +
			"memory=80G")
	}
	for _, s := range o.Set {
		if strings.HasPrefix(s, "data.seq_len=") {
			return inputf("--longest finds data.seq_len itself; leave --set %s out", terminal.Name(s))
		}
	}
	d, err := o.decider(m)
	if err != nil {
		return err
	}
	s := &stretch{o: o, path: path, d: d, ranks: ranks}
	least := max(1, (2*ranks+stretchUnit-1)/stretchUnit)
	if !s.fitsAnew(least) {
		return &InputError{fmt.Errorf("--longest: not even %d tokens: %w", least*stretchUnit, s.why)}
	}
	most := s.search(least)
	set := s.set(most) // before o.Set changes
	if !o.JSON {
		text := fmt.Sprintf("longest: %s tokens a sample; with %s, %s", readable.Count(int64(most*stretchUnit)),
			readable.Count(int64((most+1)*stretchUnit)), terminal.Text(s.why.Error()))
		if s.longer != nil {
			text += s.lifted(most)
		}
		fmt.Fprint(o.Stdout, terminal.Wrap(text+"\n\n", terminal.Columns(), 2))
	}
	o.Set = set
	return nil
}

// search returns the longest sequence that fits, given one that does. Comparing strategies takes most of the time. So
// lengths share the strategy of a length near the result, except the result and the length after it.
func (s *stretch) search(least int) int {
	lo, hi := least, 8*least
	for round := 0; ; round++ {
		fits := s.fitsAlike
		if round > 1 { // strategies alternate near the result
			fits = s.fitsAnew
		}
		if lo, hi = grow(lo, hi, fits); s.fitsAnew(lo) {
			lo, hi = grow(lo, hi, fits)
		} else {
			lo, hi = least, lo
		}
		lo = s.between(lo, hi, fits)
		switch {
		case !s.fitsAnew(lo):
			lo, hi = least, lo
		case lo < mostUnits && s.fitsAnew(lo+1):
			lo, hi = lo+1, 8*lo
		default:
			return lo
		}
	}
}

// grow raises hi until it does not fit, and lo to the last length that does.
func grow(lo, hi int, fits func(units int) bool) (int, int) {
	for hi < mostUnits && fits(hi) {
		lo, hi = hi, 8*hi
	}
	return lo, hi
}

// between returns the longest sequence that fits, given one that does and one that does not.
func (s *stretch) between(lo, hi int, fits func(units int) bool) int {
	for i := 0; lo+1 < hi; i++ {
		mid := (lo + hi) / 2
		if a, b := s.lacks[0], s.lacks[1]; i%3 < 2 && a.units > 0 && a.bytes != b.bytes {
			slope := float64(b.units-a.units) / (b.bytes - a.bytes)
			mid = min(max(b.units-int(b.bytes*slope), lo+1), hi-1)
		}
		if fits(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo
}

// set returns the flags for a length.
func (s *stretch) set(units int) []string {
	return append(slices.Clone(s.o.Set), fmt.Sprintf("data.seq_len=%d", units*stretchUnit))
}

// try returns the plan of a length, with an error if it does not fit.
func (s *stretch) try(units int, d *plan.Decider, ranks int, by decide) (*plan.Plan, error) {
	_, p, err := quick(loadPlanned, s.path, d, ranks, plan.Costs{},
		config.Options{Set: s.set(units), NoFiles: true, Decide: by})
	if err == nil && !p.Memory.Fits {
		err = p.Memory.Check()
	}
	return p, err
}

// fitsAlike reports whether a length fits with the strategy of the last length that fitsAnew has tried.
func (s *stretch) fitsAlike(units int) bool { return s.fits(units, s.d.Repeat) }

// fitsAnew reports whether a length fits with its own strategy.
func (s *stretch) fitsAnew(units int) bool { return s.fits(units, s.d.Decide) }

func (s *stretch) fits(units int, by decide) bool {
	p, err := s.try(units, s.d, s.ranks, by)
	if err != nil {
		s.why, s.longer = err, p
	}
	if err != nil && p != nil {
		s.lacks = [2]lack{s.lacks[1], {units, float64(-p.Memory.Free(s.d.Machine, s.ranks))}}
	}
	return err == nil
}

// lifted returns sentences on the bound of the longest sequence, and on changes of the machine that lift it.
func (s *stretch) lifted(longest int) string {
	m, text := s.d.Machine, ". The bound is "+s.longer.Memory.Bound(s.d.Machine, s.ranks)
	fits := func(m machine.Machine, ranks, tenths int) bool {
		d, err := s.o.decider(m)
		if err == nil {
			_, err = s.try((longest*tenths+9)/10, d, ranks, d.Decide)
		}
		return err == nil
	}
	for f := 2; f <= 8; f *= 2 {
		more := m
		more.Hosts = max(1, m.Hosts) * f
		if fits(more, s.ranks*f, 20) {
			text += fmt.Sprintf(". Twice as many tokens fit %d ranks on %d hosts", s.ranks*f, more.Hosts)
			break
		}
	}
	if all, _ := m.HostMemory(); all > 0 {
		more, not := m, "does not lift it"
		if more.RAM = 4 * all; fits(more, s.ranks, 11) {
			not = "lifts it"
		}
		text += fmt.Sprintf(". More host memory than %s (--assume ram=) %s", readable.Bytes(all), not)
	}
	return text + "."
}
