package config

import (
	"reflect"
	"slices"
)

// Equal reports whether two configs have the same values, ignoring their files.
func (c *Config) Equal(o *Config) bool {
	a, b := *c, *o
	for _, c := range []*Config{&a, &b} {
		c.Warnings, c.where, c.Data.known, c.Data.note = nil, nil, false, nil
		c.counted, c.ratio = false, 0
	}
	a.Model.LayerTypes, b.Model.LayerTypes = slices.Clip(a.Model.LayerTypes), slices.Clip(b.Model.LayerTypes)
	return reflect.DeepEqual(a, b)
}
