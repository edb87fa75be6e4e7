package chat

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ardanlabs/jinja"
)

// binary applies an operator to two values, as Python does.
func (c *call) binary(op binary) (value, error) {
	if len(c.args) != 2 {
		return none(), fmt.Errorf("an operator without its right side")
	}
	a, b := c.args[0], c.args[1]
	switch {
	case op.level > 1 && op.function != "concat":
		return c.arithmetic(op.function, a, b)
	case op.function == "concat":
		left, err := c.run.text(a)
		if err != nil {
			return none(), err
		}
		right, err := c.run.text(b)
		if err == nil {
			err = c.run.fits(len(left) + len(right))
		}
		return text(left + right), err
	case op.function == "eq" || op.function == "ne":
		return truth(equal(a, b) == (op.function == "eq")), nil
	case op.function == "in" || op.function == "not_in":
		in, err := c.contains(a, b)
		return truth(in == (op.function == "in")), err
	}
	order, err := compare(a, b)
	return truth(map[string]bool{"lt": order < 0, "gt": order > 0, "le": order <= 0, "ge": order >= 0}[op.function]), err
}

// number returns a number; a bool counts as 0 or 1.
func number(v value) (f float64, ok bool) {
	switch {
	case v.IsInt():
		return float64(v.AsInt()), true
	case v.IsFloat():
		return v.AsFloat(), true
	case v.IsBool():
		return choose(v.AsBool(), 1.0, 0), true
	}
	return 0, false
}

func equal(a, b value) bool {
	x, ok := number(a)
	y, ok2 := number(b)
	if ok && ok2 && !(a.IsInt() && b.IsInt()) {
		return x == y
	}
	return a.Equals(b)
}

// contains reports whether a value is in another.
func (c *call) contains(x, in value) (bool, error) {
	switch {
	case in.IsString() && x.IsString():
		return strings.Contains(in.AsString(), x.AsString()), c.run.spend(len(in.AsString()) / 64)
	case in.IsString():
		return false, fmt.Errorf("%s in a text", kind(x))
	case in.IsDict():
		return x.IsString() && in.AsDict().Has(x.AsString()), nil
	}
	list := c.items(in)
	if c.err == nil {
		c.err = c.run.spend(len(list))
	}
	return slices.ContainsFunc(list, func(y value) bool { return equal(x, y) }), c.err
}

func compare(a, b value) (int, error) {
	x, ok := number(a)
	y, ok2 := number(b)
	switch {
	case a.IsString() && b.IsString():
		return strings.Compare(a.AsString(), b.AsString()), nil
	case ok && ok2:
		return choose(x < y, -1, choose(x > y, 1, 0)), nil
	}
	return 0, fmt.Errorf("%s and %s have no order", kind(a), kind(b))
}

func (c *call) arithmetic(op string, a, b value) (value, error) {
	switch {
	case op == "add" && a.IsString() && b.IsString():
		s := a.AsString() + b.AsString()
		return text(s), c.run.fits(len(s))
	case op == "add" && a.IsList() && b.IsList():
		list := slices.Concat(a.AsList().Items, b.AsList().Items)
		return array(list), c.run.fits(8 * len(list))
	case op == "mul" && a.IsString() && b.IsInt():
		n := max(b.AsInt(), 0)
		if float64(n)*float64(len(a.AsString())) > float64(c.run.limit) {
			return none(), c.run.fits(c.run.limit + 1)
		}
		return text(strings.Repeat(a.AsString(), int(n))), c.run.fits(int(n) * len(a.AsString()))
	}
	x, ok := number(a)
	y, ok2 := number(b)
	if !ok || !ok2 {
		return none(), fmt.Errorf("%s of %s and %s", op, kind(a), kind(b))
	}
	if y == 0 && (op == "div" || op == "floordiv" || op == "mod") {
		return none(), fmt.Errorf("a division by 0")
	}
	f := map[string]float64{"add": x + y, "sub": x - y, "mul": x * y, "div": x / y, "floordiv": math.Floor(x / y),
		"mod": x - y*math.Floor(x/y), "pow": math.Pow(x, y)}[op]
	if a.IsFloat() || b.IsFloat() || op == "div" || op == "pow" && y < 0 {
		return jinja.NewFloat(f), nil
	}
	if math.Abs(f) > 1<<53 {
		return none(), fmt.Errorf("an integer above 2^53")
	}
	return jinja.NewInt(int64(f)), nil
}
