package options

import (
	"errors"
	"fmt"
	"reflect"
)

// Require returns one joined error that names every listed field of o that is not set,
// or nil. A field is not set when it holds its zero value; a number or a duration also
// when it is negative. o is a struct. A name that is not a field of o panics.
func Require(o any, fields ...string) error {
	v := reflect.ValueOf(o)
	var errs []error
	for _, name := range fields {
		field := v.FieldByName(name)
		if !field.IsValid() {
			panic(fmt.Sprintf("options: %s has no field %s", v.Type(), name))
		}
		if field.IsZero() || field.CanInt() && field.Int() < 0 {
			errs = append(errs, fmt.Errorf("%s.%s is required", v.Type(), name))
		}
	}
	return errors.Join(errs...)
}
